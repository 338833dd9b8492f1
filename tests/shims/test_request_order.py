"""request-order: every captured row belongs to its request, and that is proved in each step."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probing import CAPTURE_BY_HAND, STORE_BY_HAND, WORKER, Builds
from standins import GENERATOR, carried_out, module_with

from eagle3compat.errors import Refusal
from eagle3compat.shim import Status
from eagle3compat.shims.request_order import (
    SHIM,
    Chunk,
    Rows,
    StepChunks,
    Witness,
    batch_order,
    complete,
    in_batch_order,
    input_index,
    keep_batches,
)


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        line = builds.text(WORKER).splitlines()[(finding.line or 0) - 1]
        assert "def _store_captured_states" in line


@pytest.mark.parametrize("edit", [STORE_BY_HAND, CAPTURE_BY_HAND])
def test_drift_where_either_function_was_edited(
    installed: Builds, edit: tuple[str, str, str]
) -> None:
    assert installed.edited(*edit).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_worker_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.without(WORKER),
        installed.without_text(WORKER),
        installed.edited(WORKER, "def _get_captured_states(", "def _take_captured_states("),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


# --- what each step computes, from the scheduler's outputs ---------------------------------------


def output(
    scheduled: dict[str, int],
    new: dict[str, tuple[list[int], int]] | None = None,
    cached: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
) -> SimpleNamespace:
    """A scheduler output.

    Args:
        scheduled: tokens of this step by request.
        new: prompt and tokens computed before, by request.
        cached: tokens computed before, by request.
        finished: requests that are over.
    """
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=prompt, num_computed_tokens=start)
            for name, (prompt, start) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached or {}), num_computed_tokens=list((cached or {}).values())
        ),
        finished_req_ids=set(finished),
    )


def test_a_chunk_is_the_part_of_the_prompt_that_a_step_computes() -> None:
    steps = StepChunks()
    first = steps.of(output({"a": 2}, new={"a": ([7, 8, 9], 0)}))
    second = steps.of(output({"a": 1}, cached={"a": 2}))
    assert first == [Chunk("a", 0, (7, 8), 3)]
    assert second == [Chunk("a", 2, (9,), 3)]


def test_a_request_that_was_preempted_is_computed_from_its_start_again() -> None:
    steps = StepChunks()
    steps.of(output({"a": 2}, new={"a": ([7, 8, 9], 0)}))
    assert steps.of(output({"a": 3}, cached={"a": 0})) == [Chunk("a", 0, (7, 8, 9), 3)]


def test_chunks_keep_the_order_of_the_scheduled_requests() -> None:
    new = {"a": ([1], 0), "b": ([2], 0), "c": ([3], 0)}
    chunks = StepChunks().of(output({"c": 1, "a": 1, "b": 1}, new=new))
    assert [chunk.request_id for chunk in chunks] == ["c", "a", "b"]


def test_finished_requests_are_forgotten() -> None:
    steps = StepChunks()
    steps.of(output({"a": 2}, new={"a": ([7, 8, 9], 0)}))
    steps.of(output({}, finished=("a", "never seen")))
    with pytest.raises(KeyError):
        steps.of(output({"a": 1}, cached={"a": 2}))


# --- the rows of one request ---------------------------------------------------------------------


def test_rows_of_a_chunk_that_does_not_follow_the_last_are_refused() -> None:
    rows = Rows(prompt_length=4)
    rows.add(Chunk("a", 0, (1, 2), 4), [[1, 2]])
    with pytest.raises(Refusal, match=r"rows of a from position 2 on; found rows from position 3"):
        rows.add(Chunk("a", 3, (4,), 4), [[4]])


def test_rows_that_do_not_begin_at_the_start_are_refused() -> None:
    with pytest.raises(Refusal, match="from position 0 on"):
        Rows(prompt_length=4).add(Chunk("a", 2, (3, 4), 4), [[3, 4]])


def test_a_restart_drops_the_rows_before_it() -> None:
    rows = Rows(prompt_length=3)
    rows.add(Chunk("a", 0, (1, 2), 3), [[11, 21], [12, 22]])
    rows.add(Chunk("a", 0, (1, 2, 3), 3), [[11, 21, 31], [12, 22, 32]])
    assert (rows.computed, rows.layers) == (3, [[[11, 21, 31]], [[12, 22, 32]]])


def test_every_chunk_has_the_same_layers() -> None:
    rows = Rows(prompt_length=3)
    rows.add(Chunk("a", 0, (1, 2), 3), [[11, 21], [12, 22]])
    with pytest.raises(ValueError, match="shorter"):
        rows.add(Chunk("a", 2, (3,), 3), [[31]])


def test_a_layer_that_gives_too_few_rows_is_refused() -> None:
    """Counted as if they were there, they would shift the rows of every later prompt."""
    with pytest.raises(Refusal, match=r"3 rows for this step's part of a; found 2"):
        Rows(prompt_length=3).add(Chunk("a", 0, (1, 2, 3), 3), [[1, 2, 3], [1, 2]])


# --- the order of the batch ----------------------------------------------------------------------


def test_free_places_of_a_batch_are_passed_over() -> None:
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", None, "c"]))
    assert batch_order(runner) == ["a", "c"]


@pytest.mark.parametrize("runner", [SimpleNamespace(), SimpleNamespace(input_batch=None)])
def test_a_runner_that_keeps_no_batch_has_no_order(runner: Any) -> None:
    assert batch_order(runner) is None


def test_a_runner_that_keeps_no_batch_is_made_to_keep_the_one_it_prepares() -> None:
    """vLLM's V2 runner prepares a batch in each step and hands it on without keeping it."""
    batches = iter([SimpleNamespace(req_ids=["b", "a"]), SimpleNamespace(req_ids=["c"])])
    runner = SimpleNamespace(prepare_inputs=lambda scheduler_output: next(batches))
    keep_batches(runner)
    assert batch_order(runner) is None
    assert runner.prepare_inputs("step").req_ids == ["b", "a"]
    assert batch_order(runner) == ["b", "a"]
    runner.prepare_inputs(scheduler_output="step")
    assert batch_order(runner) == ["c"]


def test_a_runner_that_keeps_its_batch_is_left_alone() -> None:
    prepare = Chunk  # any callable
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a"]), prepare_inputs=prepare)
    keep_batches(runner)
    assert runner.prepare_inputs is prepare
    assert batch_order(runner) == ["a"]


A, B = Chunk("a", 0, (1, 2), 2), Chunk("b", 0, (3,), 1)


def test_chunks_follow_the_batch() -> None:
    assert in_batch_order(["b", "a"], [A, B]) == [B, A]


@pytest.mark.parametrize("order", [None, [], ["a"], ["a", "b", "c"], ["a", "c"]])
def test_a_batch_of_other_requests_is_refused(order: list[str] | None) -> None:
    with pytest.raises(Refusal, match="in the model runner"):
        in_batch_order(order, [A, B])


# --- the proof -----------------------------------------------------------------------------------


def witness_of(token_ids: Any, positions: Any) -> Witness:
    torch = pytest.importorskip("torch")
    witness = Witness()
    witness.see_embedding(None, (torch.tensor(token_ids),))
    witness.see_layer(None, (), {"positions": torch.tensor(positions), "residual": None})
    return witness


def test_rows_of_the_chunks_in_their_order_pass() -> None:
    witness_of([1, 2, 3], [0, 1, 0]).check([A, B])


def test_padding_after_the_rows_passes() -> None:
    witness_of([1, 2, 3, 0, 0], [0, 1, 0, 0, 0]).check([A, B])


@pytest.mark.parametrize("token_ids", [[3, 1, 2], [1, 2, 4], [1, 2]])
def test_other_token_ids_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(Refusal, match="other token ids"):
        witness_of(token_ids, [0, 1, 0]).check([A, B])


@pytest.mark.parametrize("positions", [[0, 1, 1], [1, 2, 0], [0, 1]])
def test_other_positions_are_refused(positions: list[int]) -> None:
    with pytest.raises(Refusal, match="other positions"):
        witness_of([1, 2, 3], positions).check([A, B])


def test_equal_prompts_are_told_apart_by_nothing_and_need_not_be() -> None:
    twins = [Chunk("a", 0, (1, 2), 2), Chunk("b", 0, (1, 2), 2)]
    witness_of([1, 2, 1, 2], [0, 1, 0, 1]).check(twins)


def test_positions_of_a_later_chunk_count_from_its_start() -> None:
    later_chunk = Chunk("a", 5, (1, 2), 7)
    witness_of([1, 2], [5, 6]).check([later_chunk])
    with pytest.raises(Refusal, match="other positions"):
        witness_of([1, 2], [0, 1]).check([later_chunk])


def test_of_multimodal_positions_the_first_row_counts() -> None:
    witness_of([1, 2, 3], [[0, 1, 0], [9, 9, 9], [9, 9, 9]]).check([A, B])


def test_a_step_whose_embedding_was_not_called_is_refused() -> None:
    with pytest.raises(Refusal, match="no call of it"):
        Witness().check([A])


def test_hidden_states_are_not_taken_for_positions() -> None:
    torch = pytest.importorskip("torch")
    witness = Witness()
    witness.see_layer(None, (torch.ones(3, 4), torch.tensor([0, 1, 2])), {})
    assert witness.positions.tolist() == [0, 1, 2]


def test_what_was_seen_speaks_for_one_step_alone() -> None:
    witness = witness_of([1, 2, 3], [0, 1, 0])
    witness.check([A, B])
    with pytest.raises(Refusal, match="no call of it"):
        witness.check([A, B])


# --- what is handed back -------------------------------------------------------------------------


def test_requests_come_in_the_order_of_their_inputs() -> None:
    rows = {f"req_3_{index}": Rows(2, 2, [[index]]) for index in (10, 2, 0)}
    assert complete(rows) == [("req_3_0", [[0]]), ("req_3_2", [[2]]), ("req_3_10", [[10]])]
    assert input_index("req_3_10") == 10


def test_a_request_that_lacks_rows_is_refused() -> None:
    with pytest.raises(Refusal, match=r"expected 5 rows of req_0_1; found 3"):
        complete({"req_0_0": Rows(2, 2, [[0]]), "req_0_1": Rows(5, 3, [[1]])})


def test_requests_of_two_calls_are_refused() -> None:
    """Two threads in one generator, say: their rows would be dealt out by index alone."""
    rows = {"req_0_0": Rows(2, 2, [[0]]), "req_1_0": Rows(2, 2, [[1]])}
    with pytest.raises(Refusal, match=r"requests of one call; found some of req_0, req_1"):
        complete(rows)


# --- installed -----------------------------------------------------------------------------------


class Executor:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((method, kwargs))
        return ["states"] if method == "_get_captured_states" else None

    def execute_model(self, scheduler_output: Any) -> None:
        self.calls.append(("execute_model", scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> str:
        self.calls.append(("sample_tokens", grammar_output))
        return "sampled"


def test_workers_are_told_before_each_step() -> None:
    module = module_with(GENERATOR, MultiprocExecutor=Executor)
    first = output({"a": 2}, new={"a": ([7, 8, 9], 0)})
    second = output({"a": 1}, cached={"a": 2})
    with carried_out(module, SHIM.id):
        executor = module.MultiprocExecutor()
        executor.execute_model(first)
        executor.execute_model(second)
    assert executor.calls == [
        ("_expect_chunks", {"args": ([Chunk("a", 0, (7, 8), 3)],)}),
        ("execute_model", first),
        ("_expect_chunks", {"args": ([Chunk("a", 2, (9,), 3)],)}),
        ("execute_model", second),
    ]


def test_three_shims_of_one_executor_work_together() -> None:
    module = module_with(GENERATOR, MultiprocExecutor=Executor)
    with carried_out(module, SHIM.id, "two-phase-step", "unique-reply"):
        executor = module.MultiprocExecutor()
        assert executor.execute_model(output({"a": 1}, new={"a": ([7], 0)})) == "sampled"
        assert executor.collective_rpc("_get_captured_states", unique_reply_rank=0) == [["states"]]
    assert [call[0] for call in executor.calls] == [
        "_expect_chunks",
        "execute_model",
        "sample_tokens",
        "_get_captured_states",
    ]


class Extension:
    """Of the consumer's shape: the decoder runs, and hands two layers' rows on."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.model_runner = SimpleNamespace(model=decoder, input_batch=SimpleNamespace(req_ids=[]))

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        self.decoder._extension = self

    def _reset_capture(self) -> None:
        self.was_reset = True

    def _store_captured_states(self, aux_hidden_states: list[Any]) -> None:
        raise AssertionError("the consumer's own was called")

    def _get_captured_states(self) -> Any:
        raise AssertionError("the consumer's own was called")

    def run(self, chunks: list[Chunk], order: list[str], padding: int = 0) -> None:
        """One step of a runner that has its batch in a given order."""
        torch = pytest.importorskip("torch")
        by_id = {chunk.request_id: chunk for chunk in chunks}
        batch = [by_id[name] for name in order]
        tokens = [token for chunk in batch for token in chunk.token_ids]
        positions = [chunk.start + k for chunk in batch for k in range(len(chunk.token_ids))]
        self.model_runner.input_batch.req_ids = [*order, None]
        ids = torch.tensor(tokens + [0] * padding)
        self.decoder(ids, torch.tensor(positions + [0] * padding))
        # A row tells its token and its layer.
        self._store_captured_states([ids[:, None] * 10 + layer for layer in (1, 2)])


class ExtensionByRequest(Extension):
    def _set_request_metadata(self, request_metadata: dict[str, int]) -> None:
        raise AssertionError("not called here")


def worker(extension: type[Extension] = Extension) -> ModuleType:
    torch = pytest.importorskip("torch")
    return module_with(WORKER, HiddenStatesWorkerExtension=extension, torch=torch)


def decoder() -> Any:
    torch = pytest.importorskip("torch")

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def forward(self, positions: Any, hidden: Any) -> Any:
            return hidden

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(100, 4)
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

        def forward(self, ids: Any, positions: Any) -> Any:
            hidden = self.embed_tokens(ids)
            for layer in self.layers:
                hidden = layer(positions, hidden=hidden)
            return hidden

    return torch.nn.Sequential(Decoder())[0]


def set_up(module: ModuleType) -> Any:
    extension = module.HiddenStatesWorkerExtension(decoder())
    extension._setup_hidden_states_capture([0, 1])
    extension._reset_capture()
    assert extension.was_reset
    return extension


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, list[int]], list[tuple[list[Chunk], list[str]]]]:
    """Prompts, and steps that compute them in chunks, in batches of any order, with preemptions."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    tokens = st.integers(0, 9)  # few, so that prompts often are alike
    prompts = {
        f"req_0_{index}": draw(st.lists(tokens, min_size=length, max_size=length))
        for index, length in enumerate(lengths)
    }
    computed = dict.fromkeys(prompts, 0)
    preemptions = draw(st.integers(0, 3))
    steps = []
    while any(computed[name] < len(prompts[name]) for name in prompts):
        waiting = [name for name in prompts if computed[name] < len(prompts[name])]
        chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        chunks = []
        for name in chosen:
            start = computed[name]
            end = start + draw(st.integers(1, len(prompts[name]) - start))
            chunks.append(Chunk(name, start, tuple(prompts[name][start:end]), len(prompts[name])))
            computed[name] = end
        steps.append((chunks, draw(st.permutations(chosen))))
        if preemptions and draw(st.booleans()):
            preemptions -= 1
            computed[draw(st.sampled_from(waiting))] = 0
    return prompts, steps


@settings(deadline=None)
@given(schedule=schedules(), padding=st.integers(0, 3))
def test_every_row_reaches_its_request_whatever_the_batches(schedule: Any, padding: int) -> None:
    prompts, steps = schedule
    with carried_out(module := worker(ExtensionByRequest), SHIM.id):
        extension = set_up(module)
        for chunks, order in steps:
            extension._expect_chunks(chunks)
            extension.run(chunks, order, padding)
        states = extension._get_captured_states()
    assert list(states) == list(prompts)
    for name, prompt in prompts.items():
        for layer, rows in enumerate(states[name], start=1):
            assert rows[:, 0].tolist() == [token * 10 + layer for token in prompt]


def test_the_earlier_speculators_gets_all_rows_of_a_layer_in_one() -> None:
    """It takes them apart by the lengths of the inputs, in their order."""
    first, second = Chunk("req_0_0", 0, (1, 2), 2), Chunk("req_0_1", 0, (3,), 1)
    with carried_out(module := worker(), SHIM.id):
        extension = set_up(module)
        extension._expect_chunks([first, second])
        extension.run([first, second], ["req_0_1", "req_0_0"])
        one, two = extension._get_captured_states()
    assert one[:, 0].tolist() == [11, 21, 31]
    assert two[:, 0].tolist() == [12, 22, 32]


@pytest.fixture
def extension() -> Iterator[Any]:
    with carried_out(module := worker(), SHIM.id):
        yield set_up(module)


def test_a_step_that_was_not_announced_is_no_request(extension: Any) -> None:
    """vLLM warms up, and runs dummy batches."""
    extension.run([Chunk("req_0_0", 0, (1, 2), 2)], ["req_0_0"])
    assert extension._get_captured_states() is None


def test_an_announcement_is_good_for_one_step(extension: Any) -> None:
    chunk, dummy = Chunk("req_0_0", 0, (1, 2), 2), Chunk("dummy", 0, (0, 0, 0), 3)
    extension._expect_chunks([chunk])
    extension.run([chunk], ["req_0_0"])
    extension.run([dummy], ["dummy"])
    assert extension._get_captured_states()[0][:, 0].tolist() == [11, 21]


def test_a_step_past_the_embedding_is_not_taken_for_the_dummy_batch_before_it(
    extension: Any,
) -> None:
    dummy = Chunk("req_0_0", 0, (0, 0), 2)
    extension.run([dummy], ["req_0_0"])
    extension._expect_chunks([dummy])
    with pytest.raises(Refusal, match="no call of it"):
        extension._store_captured_states([[0, 0], [0, 0]])


def test_a_decoder_whose_embedding_goes_by_another_name_is_refused() -> None:
    with carried_out(module := worker(), SHIM.id):
        model = decoder()
        model.wte = model.embed_tokens
        del model.embed_tokens
        extension = module.HiddenStatesWorkerExtension(model)
        with pytest.raises(Refusal, match="embeddings of Decoder under the name embed_tokens"):
            extension._setup_hidden_states_capture([0, 1])


def test_states_are_handed_out_once(extension: Any) -> None:
    chunk = Chunk("req_0_0", 0, (1, 2), 2)
    extension._expect_chunks([chunk])
    extension.run([chunk], ["req_0_0"])
    extension._get_captured_states()
    assert extension._get_captured_states() is None


def test_a_reset_drops_what_a_failed_call_left(extension: Any) -> None:
    half = Chunk("req_0_0", 0, (1,), 2)
    extension._expect_chunks([half])
    extension.run([half], ["req_0_0"])
    extension._reset_capture()
    assert extension._get_captured_states() is None


def test_states_of_a_half_computed_prompt_are_refused(extension: Any) -> None:
    half = Chunk("req_0_0", 0, (1,), 2)
    extension._expect_chunks([half])
    extension.run([half], ["req_0_0"])
    with pytest.raises(Refusal, match="2 rows of req_0_0; found 1"):
        extension._get_captured_states()


def test_a_batch_in_another_order_than_the_runner_says_is_refused(extension: Any) -> None:
    first, second = Chunk("req_0_0", 0, (1,), 1), Chunk("req_0_1", 0, (2,), 1)
    extension._expect_chunks([first, second])
    with pytest.raises(Refusal, match="other token ids"):
        # The runner says 0, 1; what passes through the model says 1, 0.
        extension.run(
            [Chunk("req_0_0", 0, (2,), 1), Chunk("req_0_1", 0, (1,), 1)], ["req_0_0", "req_0_1"]
        )
    assert extension._get_captured_states() is None


def test_layers_keep_their_asked_order_on_top_of_it() -> None:
    chunk = Chunk("req_0_0", 0, (1, 2), 2)
    with carried_out(module := worker(), SHIM.id, "layer-order"):
        extension = module.HiddenStatesWorkerExtension(decoder())
        extension._setup_hidden_states_capture([5, 3])
        extension._reset_capture()
        extension._expect_chunks([chunk])
        extension.run([chunk], ["req_0_0"])
        first, second = extension._get_captured_states()
    # The decoder above stores ascending layers as 1 and 2: layer 5 is the second of them.
    assert first[:, 0].tolist() == [12, 22]
    assert second[:, 0].tolist() == [11, 21]
