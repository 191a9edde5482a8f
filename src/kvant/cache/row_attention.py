"""The largest attention weights that rows of a prompt get while a model repeats the prompt.

    columns of a fork   | a b c d e f g h | t t t ... |
                          the prompt        repeated tokens, which only the fork stores

The weight of each row a to h is the maximum over the queries t and the query heads of a key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.cache.readable_rows import mask_present_rows, read_columns
from kvant.contracts import AttentionRequest, View
from kvant.errors import CacheError

MAX_LOGITS = 1 << 22  # attention scores computed at once: 16 MiB in float32


class RowAttention:
    """The largest attention weight that each row of one prompt got so far.

    It takes 4 bytes per row and key head, a few percent of the bytes of the rows. The memory budget
    of an engine does not include them.
    """

    def __init__(self, num_columns: int) -> None:
        """Create an empty record for a prompt of `num_columns` columns."""
        self.num_columns = num_columns
        self.by_leaf: dict[int, Tensor] = {}  # [key heads, columns], float32

    @torch.no_grad()
    def record(self, leaf: int, view: View, request: AttentionRequest) -> None:
        """Update the largest weights of a layer's rows with the queries of `request`.

        The cache must have one sequence.

        Layers that share these rows add their own queries.
        """
        if isinstance(request.mask, Tensor):
            raise CacheError(
                f"a mask tensor {list(request.mask.shape)} during a second pass, which supports "
                "only the causal mask: use prune=keydiff:KEEP for this model"
            )
        page_table, frame = view.page_table, view.keys.codec.frame
        keys = read_columns(view, "keys", 0, page_table.num_columns)[0]
        queries = frame.transform_queries(request.q)[0]
        queries = queries.view(view.heads, -1, *queries.shape[1:])
        present = torch.from_numpy(mask_present_rows(page_table).repeat(view.keys.heads, 0))
        sink_logits = [None] * view.heads
        if request.sink_logits is not None:
            sink_logits = [*request.sink_logits.float().view(view.heads, -1, 1, 1)]
        weights = torch.stack(
            [
                _compute_max_attention(*head, request)[: self.num_columns]
                for head in zip(queries, keys, present.to(keys.device), sink_logits, strict=True)
            ]
        )
        old = self.by_leaf.get(leaf)
        self.by_leaf[leaf] = weights if old is None else torch.maximum(old, weights)


def _compute_max_attention(
    queries: Tensor,
    keys: Tensor,
    present: Tensor,
    sink_logits: Tensor | None,
    request: AttentionRequest,
) -> Tensor:
    """Return the largest weight of each row [n] under queries [group, T, D] of the newest rows."""
    group, num_queries, _ = queries.shape
    num_rows, transposed = len(keys), keys.float().T
    largest = transposed.new_full((num_rows,), float("-inf"))  # logarithms
    columns = torch.arange(num_rows, device=keys.device)
    step = max(1, MAX_LOGITS // (group * num_rows))
    for start in range(0, num_queries, step):
        logits = queries[:, start : start + step].float() @ transposed * request.scale
        if request.softcap is not None:
            logits = torch.tanh(logits / request.softcap) * request.softcap
        newest = columns[num_rows - num_queries + start :][: logits.shape[1], None]
        logits.masked_fill_(~present | (columns > newest), float("-inf"))
        total = logits.logsumexp(-1, keepdim=True)
        if sink_logits is not None:
            total = torch.logaddexp(total, sink_logits)
        largest = torch.maximum(largest, logits.sub_(total).amax((0, 1)))
    return largest.exp()
