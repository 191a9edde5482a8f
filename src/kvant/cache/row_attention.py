"""The largest attention weights that rows get while a model repeats its prompt.

rows of the prompt   | a b c d e f g h |
rows of the pass                       | t t t ... |   a fork of the cache has them
a weight of each row   max over the queries t and the query heads of a key head
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

    It takes 4 bytes for each row of a key head, which no engine counts: a few percent of the rows.
    """

    def __init__(self, num_columns: int) -> None:
        """Start without weights of the rows of `num_columns` columns."""
        self.num_columns = num_columns
        self.by_leaf: dict[int, Tensor] = {}  # [key heads, columns], float32

    @torch.no_grad()
    def record(self, leaf: int, view: View, request: AttentionRequest) -> None:
        """Raise the weights of a layer's rows to those of these queries, of one sequence.

        Layers that share these rows add their own queries.
        """
        if isinstance(request.mask, Tensor):
            raise CacheError(
                f"a mask tensor {list(request.mask.shape)} during a second pass, whose attention "
                "weights follow the causal mask: prune=keydiff:KEEP takes such models"
            )
        page_table, frame = view.page_table, view.keys.codec.frame
        keys = read_columns(view, "keys", 0, page_table.num_columns)[0]
        queries = frame.transform_queries(request.q)[0]
        queries = queries.view(view.heads, -1, *queries.shape[1:])
        present = torch.from_numpy(mask_present_rows(page_table).repeat(view.keys.heads, 0))
        sinks = [None] * view.heads
        if request.sink_logits is not None:
            sinks = [*request.sink_logits.float().view(view.heads, -1, 1, 1)]
        weights = torch.stack(
            [
                _compute_max_attention(*head, request)[: self.num_columns]
                for head in zip(queries, keys, present.to(keys.device), sinks, strict=True)
            ]
        )
        old = self.by_leaf.get(leaf)
        self.by_leaf[leaf] = weights if old is None else torch.maximum(old, weights)


def _compute_max_attention(
    queries: Tensor, keys: Tensor, present: Tensor, sinks: Tensor | None, request: AttentionRequest
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
        if sinks is not None:
            total = torch.logaddexp(total, sinks)
        largest = torch.maximum(largest, logits.sub_(total).amax((0, 1)))
    return largest.exp()
