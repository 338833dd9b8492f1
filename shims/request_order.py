"""Attribute every captured row to its request: the runner orders its batch by itself.

The parent says before each step which tokens of which request are computed in it. The worker
reads the order of its batch from the model runner, and proves it: the token ids and positions
that pass through the model must be those of the requests in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import COLLECT_030, COLLECT_040, STORE_030, STORE_040
from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.probes import all_of, known_function
from eagle3compat.shim import GENERATOR, WORKER, Contract, Finding, Patch, Process, Shim, Status

_CALL_SITE = "speculators/data_generation/custom_worker.py in _store_captured_states"


@dataclass(frozen=True)
class Chunk:
    """The part of one prompt that a step computes.

    Args:
        request_id: vLLM's id of the request.
        start: position of its first token in the prompt.
        token_ids: the tokens.
        prompt_length: tokens of the whole prompt.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    prompt_length: int


class StepChunks:
    """Follows the scheduler's outputs in the parent, to say what each step computes."""

    def __init__(self) -> None:
        self._prompts: dict[str, list[int]] = {}

    def of(self, scheduler_output: Any) -> list[Chunk]:
        """The chunks of one step.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput``.
        """
        starts: dict[str, int] = {}
        for request in scheduler_output.scheduled_new_reqs:
            self._prompts[request.req_id] = list(request.prompt_token_ids)
            starts[request.req_id] = request.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in scheduler_output.finished_req_ids:
            self._prompts.pop(request_id, None)
        return [
            self._chunk(request_id, starts[request_id], count)
            for request_id, count in scheduler_output.num_scheduled_tokens.items()
        ]

    def _chunk(self, request_id: str, start: int, count: int) -> Chunk:
        prompt = self._prompts[request_id]
        return Chunk(request_id, start, tuple(prompt[start : start + count]), len(prompt))


@dataclass
class Rows:
    """The rows of one request so far: one list of tensors a layer."""

    prompt_length: int
    computed: int = 0
    layers: list[list[Any]] = field(default_factory=list)

    def add(self, chunk: Chunk, states: list[Any]) -> None:
        """Append a chunk's rows; a request that was preempted starts again from its first."""
        if chunk.start == 0:
            self.computed, self.layers = 0, [[] for _ in states]
        if chunk.start != self.computed:
            raise _refusal(
                f"rows of {chunk.request_id} from position {self.computed} on",
                f"rows from position {chunk.start} on",
            )
        for layer, rows in zip(self.layers, states, strict=True):
            if len(rows) != len(chunk.token_ids):
                raise _refusal(
                    f"{len(chunk.token_ids)} rows for this step's part of {chunk.request_id}",
                    f"{len(rows)} in what a decoder layer gave",
                )
            layer.append(rows)
        self.computed += len(chunk.token_ids)


@dataclass(frozen=True)
class Testimony:
    """Whether a step's rows were the announced ones, as the device will know.

    Args:
        token_ids_differ: a tensor of one bool.
        positions_differ: likewise; None where the layers are given no positions.
    """

    token_ids_differ: Any
    positions_differ: Any

    def check(self) -> None:
        """Wait for the device, and raise a ``Refusal`` unless the rows were the announced ones."""
        if bool(self.token_ids_differ):
            raise _refusal("rows in the order of the runner's batch", "other token ids in them")
        if self.positions_differ is not None and bool(self.positions_differ):
            raise _refusal("rows at the prompts' positions", "other positions in them")


def _differ(found: Any, expected: list[int]) -> Any:
    """Whether the first values of a tensor are others, or fewer, as a tensor of its device."""
    if len(found) < len(expected):
        return found.new_ones((), dtype=bool)
    on_host = found.new_tensor(expected, device="cpu")
    if found.device.type == "cuda":
        on_host = on_host.pin_memory()  # a copy from other memory waits for the device
    wanted = on_host.to(found.device, non_blocking=True)
    return (found[: len(expected)] != wanted).any()


class Witness:
    """Sees the token ids and positions that pass through the model in one step.

    Layers that are given no positions leave the token ids alone to speak.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop what was seen: what an earlier step did says nothing of the next."""
        self.token_ids: Any = None
        self.positions: Any = None

    def see_embedding(self, embedding: Any, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the token embedding."""
        self.token_ids = args[0]

    def see_layer(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a decoder layer: positions are its only integer tensor."""
        for value in (*args, *kwargs.values()):
            if hasattr(value, "is_floating_point") and not value.is_floating_point():
                self.positions = value if value.dim() == 1 else value[0]
                return

    def testify(self, chunks: list[Chunk]) -> Testimony:
        """Compare what was seen with the chunks, without waiting for the device.

        Raises:
            Refusal: nothing was seen.
        """
        token_ids, positions = self.token_ids, self.positions
        self.forget()
        expected_ids = [token for chunk in chunks for token in chunk.token_ids]
        if token_ids is None:
            raise _refusal("the token ids of the step at the embedding", "no call of it")
        expected = [
            chunk.start + offset for chunk in chunks for offset in range(len(chunk.token_ids))
        ]
        return Testimony(
            _differ(token_ids, expected_ids),
            None if positions is None else _differ(positions, expected),
        )

    def check(self, chunks: list[Chunk]) -> None:
        """Raise a ``Refusal`` unless the rows are those of the chunks, in their order."""
        self.testify(chunks).check()


def keep_batches(model_runner: Any) -> None:
    """Have a runner that keeps no batch, vLLM's V2, keep the one that it prepares for a step."""
    prepare = getattr(model_runner, "prepare_inputs", None)
    if hasattr(model_runner, "input_batch") or prepare is None:
        return

    def prepare_and_keep(*args: Any, **kwargs: Any) -> Any:
        model_runner._prepared_batch = prepare(*args, **kwargs)
        return model_runner._prepared_batch

    model_runner.prepare_inputs = prepare_and_keep


def batch_order(model_runner: Any) -> list[str] | None:
    """Request ids in the order of the runner's batch in this step; None where it is not kept."""
    kept = getattr(model_runner, "_prepared_batch", None)
    input_batch = getattr(model_runner, "input_batch", kept)
    if input_batch is None:
        return None
    return [request_id for request_id in input_batch.req_ids if request_id is not None]


def in_batch_order(order: list[str] | None, chunks: list[Chunk]) -> list[Chunk]:
    """The chunks in the order of the batch; raises a ``Refusal`` when it holds other requests."""
    by_id = {chunk.request_id: chunk for chunk in chunks}
    if order is None or set(order) != set(by_id):
        raise _refusal(f"a batch of {sorted(by_id)}", f"{order} in the model runner")
    return [by_id[request_id] for request_id in order]


def input_index(request_id: str) -> int:
    """Index of a request's prompt among the inputs of its call: ids are req_<call>_<index>."""
    return int(request_id.rpartition("_")[2])


def complete(rows: dict[str, Rows]) -> list[tuple[str, list[list[Any]]]]:
    """Every request's rows in the order of the inputs.

    Raises:
        Refusal: a request lacks rows, or belongs to another call.
    """
    calls = sorted({request_id.rpartition("_")[0] for request_id in rows})
    if len(calls) > 1:
        raise _refusal("requests of one call", f"some of {', '.join(calls)} (two at a time?)")
    for request_id, found in rows.items():
        if found.computed != found.prompt_length:
            raise _refusal(
                f"{found.prompt_length} rows of {request_id}",
                f"{found.computed} (is the KV cache too small for this prompt?)",
            )
    return [(name, rows[name].layers) for name in sorted(rows, key=input_index)]


def _refusal(expected: str, found: str) -> Refusal:
    return Refusal(_CALL_SITE, expected, found, "Nothing of this call is returned.")


def _install_in_parent(module: ModuleType, patcher: Patcher) -> None:
    def derive(base: Any) -> type:
        class ExecutorThatAnnounces(base):  # type: ignore[misc]
            def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                if not hasattr(self, "_step_chunks"):
                    self._step_chunks = StepChunks()
                self.collective_rpc(
                    "_expect_chunks", args=(self._step_chunks.of(scheduler_output),)
                )
                return super().execute_model(scheduler_output, *args, **kwargs)

        return ExecutorThatAnnounces

    patcher.extend(module, "MultiprocExecutor", derive)


def _install_in_worker(module: ModuleType, patcher: Patcher) -> None:
    extension = module.HiddenStatesWorkerExtension
    torch = module.torch
    answers_by_request = hasattr(extension, "_set_request_metadata")  # speculators 0.4

    def set_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        decoder = next(
            part
            for part in instance.model_runner.model.modules()
            if vars(part).get("_extension") is instance
        )
        embedding = getattr(decoder, "embed_tokens", None)
        if embedding is None:
            raise _refusal(
                f"token embeddings of {type(decoder).__name__} under the name embed_tokens",
                "none: nothing would show which tokens its rows are of",
            )
        keep_batches(instance.model_runner)
        instance._chunks = []
        instance._request_rows = {}
        instance._witness = Witness()
        embedding.register_forward_pre_hook(instance._witness.see_embedding)
        decoder.layers[0].register_forward_pre_hook(instance._witness.see_layer, with_kwargs=True)

    def expect_chunks(self: Any, chunks: list[Chunk]) -> None:
        self._chunks = chunks
        self._witness.forget()

    def store(self: Any, aux_hidden_states: list[Any]) -> None:
        announced, self._chunks = self._chunks, []
        if not announced:
            return  # vLLM warms up, or runs a dummy batch
        chunks = in_batch_order(batch_order(self.model_runner), announced)
        self._witness.check(chunks)
        offset = 0
        for chunk in chunks:
            end = offset + len(chunk.token_ids)
            rows = self._request_rows.setdefault(chunk.request_id, Rows(chunk.prompt_length))
            rows.add(chunk, [states[offset:end] for states in aux_hidden_states])
            offset = end

    def reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        instance._request_rows = {}

    def collect(self: Any) -> Any:
        requests = complete(self._request_rows)
        self._request_rows = {}
        if not requests:
            return None
        if answers_by_request:
            return {name: [torch.cat(rows) for rows in layers] for name, layers in requests}
        return [
            torch.cat([rows for _, layers in requests for rows in layers[index]])
            for index in range(len(requests[0][1]))
        ]

    patcher.wrap(extension, "_setup_hidden_states_capture", set_up)
    patcher.wrap(extension, "_reset_capture", reset)
    patcher.replace(extension, "_expect_chunks", expect_chunks)
    patcher.replace(extension, "_store_captured_states", store)
    patcher.replace(extension, "_get_captured_states", collect)


_STORED = "rows are appended as the runner's batch has them, and attributed by their order of input"
_STORED_040 = "counts of prompt tokens are kept apart from the scheduler's, and drift on preemption"

SHIM = Shim(
    id="request-order",
    title="rows are attributed to requests, and the attribution is proved",
    contracts=(
        Contract(
            WORKER,
            "HiddenStatesWorkerExtension._store_captured_states",
            "vllm.v1.worker.gpu_input_batch.InputBatch.req_ids",
            "a batch in the order of the inputs",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=all_of(
        known_function(
            WORKER,
            "HiddenStatesWorkerExtension._store_captured_states",
            {
                STORE_030: Finding(Status.NEEDED, _STORED),
                STORE_040: Finding(Status.NEEDED, _STORED_040),
            },
            "def _store_captured_states",
        ),
        known_function(
            WORKER,
            "HiddenStatesWorkerExtension._get_captured_states",
            {
                COLLECT_030: Finding(Status.NEEDED, _STORED),
                COLLECT_040: Finding(Status.NEEDED, _STORED_040),
            },
            "def _get_captured_states",
        ),
    ),
    patches=(Patch(GENERATOR, _install_in_parent), Patch(WORKER, _install_in_worker)),
    process=Process.BOTH,
    why=(
        "The runner fills freed places of its batch, and may put short queries first: rows then "
        "stand in another order than the inputs."
    ),
    upstream=(
        "https://github.com/vllm-project/speculators/issues/279 (rows attributed by input order), "
        "https://github.com/vllm-project/speculators/pull/283 (by counts)"
    ),
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
    after=("decoder-layers", "two-phase-step", "unique-reply"),
)
