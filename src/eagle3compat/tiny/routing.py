"""Which experts a token goes to, so that rounding never changes it.

Random weights make a poor yardstick when rounding can change which experts a token goes to: one
flip, and two right implementations differ by tenths. So the residual stream keeps its first
`ROUTING_GROUPS` coordinates for routing. The embedding sets exactly one of them, no layer writes
to them, and a router reads nothing else: it gives each group its own order of the experts, with
wide gaps between neighbours. Tokens still spread over all experts, differently in every layer, and
neither float32 nor bfloat16 rounding moves one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3compat.tiny.configuration import TextSizes
from eagle3compat.tiny.draw import Draw
from eagle3compat.tiny.safetensors_file import Tensor, bfloat16

ROUTING_GROUPS = 16
ROUTING_VALUE = 4.0
ROUTER_STEP = 0.5
EXPERT_BIAS = 0.01


def set_routing_group(embedding: Any) -> None:
    """Set the routing coordinates of each token's row, in place."""
    import numpy as np

    tokens = np.arange(len(embedding))
    embedding[:, :ROUTING_GROUPS] = 0.0
    embedding[tokens, tokens % ROUTING_GROUPS] = ROUTING_VALUE


def router(prefix: str, sizes: TextSizes, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    """Ranks the experts for each group: the layer's own order, one step further for the next group.

    Zero lies half-way between the last expert that is chosen and the first that is not.
    """
    import numpy as np

    experts = sizes.n_routed_experts
    name = f"{prefix}gate.weight"
    rank = (draw.order(name, experts)[:, None] + np.arange(ROUTING_GROUPS)) % experts
    values = np.zeros((experts, sizes.hidden_size))
    values[:, :ROUTING_GROUPS] = ROUTER_STEP * (sizes.num_experts_per_tok - 0.5 - rank)
    yield name, bfloat16(values)
    bias = draw.normal(f"{prefix}bias", (experts,), EXPERT_BIAS).astype("<f4")
    yield f"{prefix}gate.e_score_correction_bias", Tensor("F32", bias.shape, bias.tobytes())
