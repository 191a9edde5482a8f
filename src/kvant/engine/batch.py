"""Run the sequences of one model over shared pools: prefill in chunks, decode in one batch.

Decoding sequences of the same adapter are merged under one cache (`kvant.merge`). Every other
sequence has its own cache over the same pools. When a sequence joins or leaves a batch, only page
tables change; no page is copied. If the model's attention does not support different lengths, each
sequence is decoded alone. Each forward goes to the decoder, in generation/decoder.py.

On a GPU, a decode replays a graph. Graphs are captured for some batch sizes; other batches are
padded with idle sequences of a few meaningless tokens.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.adapters import Adapter, AdapterSwitch
from kvant.cache import merge
from kvant.cache.files import save
from kvant.cache.pruning import count_tokens_until_prune
from kvant.cache.reports import measure_pools
from kvant.engine.memory import MAX_IDLE_TOKENS
from kvant.engine.request import ChunkForward, Request, Sequence, compute_last_logits
from kvant.errors import UnsupportedView
from kvant.generation import TransformersDecoder
from kvant.generation.second_pass import Repetition
from kvant.hf import SupportLevel, TransformersCache, load_cache
from kvant.pages.advance import MAX_DRAFT_COLUMNS
from kvant.replay import ReplayBuffers, Replayer
from kvant.vision import ImageFeatures, ProcessedImage

log = logging.getLogger("kvant")

MAX_DRAFTS = MAX_DRAFT_COLUMNS - 1  # the newest token takes one column
PADDING_TOKEN = 0  # in place of drafts that a sequence does not have


@dataclass(eq=False)
class MergedSequences:
    """Sequences of one adapter that decode in one forward."""

    members: list[Sequence] = field(default_factory=list)  # in the order of the cache
    cache: TransformersCache | None = None  # None: there are no members

    def drop(self, sequences: list[Sequence]) -> None:
        """Remove sequences; ignore those that are no members."""
        remaining = [member for member in self.members if member not in sequences]
        if not remaining:
            self.cache = None
        elif self.cache is not None and len(remaining) < len(self.members):
            self.cache.batch_select_indices([self.members.index(kept) for kept in remaining])
        self.members = remaining


class SequenceCaches:
    """The caches of all sequences, over the same pools.

    Sequences that decode together are merged into one cache for each adapter. Every other sequence
    has a cache of its own, or a swap file.
    """

    def __init__(self, empty_cache: TransformersCache) -> None:
        self.empty_cache = empty_cache  # never has tokens; all others share its pools
        self.merged: dict[Adapter | None, MergedSequences] = {}

    def locate(self, sequence: Sequence) -> tuple[TransformersCache | None, int]:
        """Return the cache that holds a sequence, and its index there."""
        merged = self.merged.get(sequence.adapter)
        if merged is not None and sequence in merged.members:
            return merged.cache, merged.members.index(sequence)
        return sequence.cache, 0

    def count_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence are cached."""
        cache, index = self.locate(sequence)
        if cache is None:
            return 0
        return cache.length if cache is sequence.cache else cache.states.lengths[index]

    def import_cache(self, cache: TransformersCache) -> TransformersCache:
        """Return this cache in the shared pools; if there are none yet, use those of `cache`."""
        if self.has_pools:
            return self.empty_cache.merge_with([cache])
        self.adopt_pools(cache)
        return cache

    @property
    def has_pools(self) -> bool:
        """Whether pools exist; page sizes are known only once rows were stored."""
        return bool(self.empty_cache.states.state.storages)

    def adopt_pools(self, cache: TransformersCache) -> None:
        """Use the pools of `cache` for all sequences, if there are none yet."""
        if not self.has_pools:
            self.empty_cache = cache.fork()
            self.empty_cache.reset()

    def merge(self, sequences: list[Sequence]) -> MergedSequences:
        """Merge exactly these sequences of one adapter: extract other members, add missing ones."""
        merged = self.merged.setdefault(sequences[0].adapter, MergedSequences())
        self.extract([member for member in merged.members if member not in sequences])
        new = [sequence for sequence in sequences if sequence not in merged.members]
        if new:
            current = [] if merged.cache is None else [merged.cache]
            merged.cache = merge([*current, *(sequence.cache for sequence in new)])
            merged.members = [*merged.members, *new]
            for sequence in new:
                sequence.cache = None
        return merged

    def extract(self, sequences: list[Sequence]) -> None:
        """Move sequences to caches of their own; ignore those that are not merged."""
        for merged in self.merged.values():
            members = [sequence for sequence in sequences if sequence in merged.members]
            if merged.cache is not None and members:
                for member in members:
                    member.cache = merged.cache.extract(merged.members.index(member))
                merged.drop(members)

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Give `target` the tokens that `source` has cached; they share pages."""
        assert source.cache is not None
        source.cache.prune()  # before the fork, so that both share the kept rows
        target.cache, target.num_prefilled = source.cache.fork(), source.num_prefilled

    def rewind(self, sequences: list[Sequence]) -> None:
        """Drop rejected drafts: keep all tokens of each sequence but the newest, not yet cached.

        A sequence with recurrent layers returns to its checkpoint, so fewer tokens may be cached.
        """
        for sequence in sequences:
            if sequence.cache is not None:
                sequence.cache.rewind(sequence.cache.reachable(len(sequence.tokens) - 1))
        for merged in self.merged.values():
            if merged.cache is not None and not set(sequences).isdisjoint(merged.members):
                merged.cache.rewind_each([len(member.tokens) - 1 for member in merged.members])

    def release(self, sequences: list[Sequence]) -> None:
        """Free the pages and the swap files of sequences."""
        for merged in self.merged.values():
            merged.drop(sequences)
        for sequence in sequences:
            sequence.cache = None
            if sequence.swap_file is not None:
                sequence.swap_file.unlink(missing_ok=True)
                sequence.swap_file = None

    def swap_out(self, sequence: Sequence, path: Path, *, is_decoding: bool) -> None:
        """Write the pages of a sequence to a file, if it has any, and free them.

        If a decode is next, the prompt is pruned first: a file does not record a pending prune.
        """
        self.extract([sequence])
        if sequence.cache is not None:
            if is_decoding:
                sequence.cache.prune()
            sequence.swap_file = path
            save(sequence.cache, path)
            sequence.cache = None

    def swap_in(self, sequence: Sequence, model: PreTrainedModel) -> None:
        """Read the pages of a swapped-out sequence back, if it had any."""
        if sequence.swap_file is not None:
            cache = load_cache(sequence.swap_file, model)
            sequence.swap_file.unlink()
            sequence.swap_file = None
            cache.backend = self.empty_cache.backend
            sequence.cache = self.import_cache(cache)

    def clear(self) -> None:
        """Free all memory except that of prefixes, once no sequence is left."""
        self.merged = {}
        self.empty_cache.clear()

    def stats(self, sequences: list[Sequence]) -> dict[str, int]:
        """Return the bytes of the pools, and of the recurrent states of `sequences`."""
        pools, nbytes_states = measure_pools(self.empty_cache.states), 0
        # Refer to caches only if there are recurrent states: a reference delays freeing.
        if self.empty_cache.states.holder.external_states:
            caches = {merged.cache for merged in [*self.merged.values()]}
            caches |= {sequence.cache for sequence in sequences}
            nbytes_states = sum(
                state.nbytes
                for cache in caches
                if cache is not None
                for state in cache.states.holder.external_states.values()
            )
        return pools | {"nbytes_states": nbytes_states}


class Batch:
    """The forwards of all sequences that one model serves; it knows nothing of requests."""

    def __init__(
        self,
        decoder: TransformersDecoder,
        empty_cache: TransformersCache,
        backend: str | None = None,
    ) -> None:
        self.decoder = decoder
        # Whether sequences of different lengths decode in one batch; else one by one.
        self.ragged = decoder.support.level >= SupportLevel.RAGGED_BATCH
        self.verifies_drafts = decoder.supports_chunked_prefill
        limits = decoder.max_context, empty_cache.capacity
        self._max_lengths = [limit for limit in limits if limit is not None]  # of a sequence
        # The sequences of a batch must be rewound to lengths of their own.
        cannot_rewind = empty_cache.is_recurrent or empty_cache.spec.retains_queries
        self.verifies_drafts_in_batch = self.verifies_drafts and self.ragged and not cannot_rewind
        empty_cache.backend = backend
        self.caches = SequenceCaches(empty_cache)
        self._adapter_switch = AdapterSwitch(decoder.model)
        # Requests and cached prefixes keep features alive, so that equal images share them.
        self._features: WeakValueDictionary[tuple[Adapter | None, str, bytes], ImageFeatures] = (
            WeakValueDictionary()
        )
        # By number of sequences, tokens of each, and adapter: a capture computes one adapter.
        self._replayers: dict[tuple[int, int, Adapter | None], Replayer] = {}
        self._replay_buffers = ReplayBuffers()  # shared by the replayers
        self._idle_sequences: dict[Adapter | None, list[Sequence]] = {}  # padding of batches
        self._idle_template: Sequence | None = None  # forked for each idle sequence

    def prefill(
        self, sequence: Sequence, count: int, run_chunk: ChunkForward = compute_last_logits
    ) -> Tensor:
        """Prefill `count` tokens of a prompt; return what `run_chunk` returns."""
        cache = self.caches.empty_cache.fork() if sequence.cache is None else sequence.cache
        begin = cache.length
        with cache.prompt_mode(), self._adapter_switch.use(sequence.adapter):
            output = run_chunk(self.decoder, sequence.tokens[begin : begin + count], cache)
        cache.states.holder.free_retired_pages()
        sequence.cache = cache
        if sequence.num_prefilled == begin:
            sequence.num_prefilled += count
        self.caches.adopt_pools(cache)
        return output

    def encode_image(self, request: Request, image: ProcessedImage) -> bool:
        """Give a request the features of an image; return whether they were computed now.

        Requests of one salt and adapter share features.
        """
        assert request.images is not None
        key = request.adapter, request.salt, image.digest
        features = self._features.get(key)
        is_new = features is None
        if features is None:
            with self._adapter_switch.use(request.adapter):
                features = request.images.vision_model.compute_features(image)
        self._features[key] = request.images.features[image.digest] = features
        return is_new

    def repeat(self, sequence: Sequence, repetition: Repetition, count: int) -> None:
        """Run `count` tokens of the second pass over a prompt; the last ones prune its cache."""
        assert sequence.cache is not None
        with self._adapter_switch.use(sequence.adapter):
            repetition.run_next(self.decoder.compute_logits, sequence.cache, count)
        if repetition.fork is not None:
            repetition.fork.states.holder.free_retired_pages()
        sequence.cache.states.holder.free_retired_pages()

    def count_max_drafts(self, sequences: list[Sequence]) -> int:
        """Return how many drafts of each of these sequences one decode can verify."""
        in_batch = len(sequences) > 1
        if not (self.verifies_drafts_in_batch if in_batch else self.verifies_drafts):
            return 0
        caches = {self.caches.locate(sequence)[0] for sequence in sequences}
        states = [cache.state for cache in caches if cache is not None]
        longest = max(len(sequence.tokens) for sequence in sequences)
        rooms = [limit - longest for limit in self._max_lengths]
        until_prunes = map(count_tokens_until_prune, states)
        rooms += [count - 1 for count in until_prunes if count is not None]
        return max(0, min([MAX_DRAFTS, *rooms]))

    def decode(
        self, sequences: list[Sequence], drafts: abc.Sequence[list[int]] = ()
    ) -> tuple[Tensor, dict[int, Exception]]:
        """Return the logits [sequences, T, vocabulary], and errors by index of `sequences`.

        Column t holds the logits after the newest token and t drafts. T is 1 if the drafts were
        not verified. The sequences are of one adapter. Failed ones have no row. If the whole batch
        fails, no sequence has changed, and each is tried alone, without drafts.
        """
        num_new = 1 + max(map(len, drafts), default=0)
        if (self.ragged and len(sequences) > 1) or num_new > 1:
            try:
                return self._decode_batch(sequences, drafts, num_new), {}
            except UnsupportedView as error:
                if num_new > 1:
                    self._disable_drafts(error, in_batch=len(sequences) > 1)
                    return self.decode(sequences)
                self._disable_batching(error)
            except Exception as error:
                text = repr(error)  # a log handler may store the error, and with it our caches
                log.warning(
                    "a decode of %d sequences and %d drafts failed: %s: one by one, without drafts",
                    *(len(sequences), num_new - 1, text),
                )
        rows, errors = list[Tensor](), dict[int, Exception]()
        for index, sequence in enumerate(sequences):
            try:
                rows.append(self._decode_single(sequence))
            except Exception as error:
                errors[index] = error
        return torch.cat(rows) if rows else torch.empty(0), errors

    def clear(self) -> None:
        """Free all memory except that of prefixes, once no sequence is left."""
        self._idle_sequences, self._idle_template = {}, None
        self._replayers.clear()
        self._replay_buffers = ReplayBuffers()
        self.caches.clear()

    # ---- internals

    def _decode_batch(
        self, sequences: list[Sequence], drafts: abc.Sequence[list[int]], num_new: int
    ) -> Tensor:
        """Decode all sequences in one forward of `num_new` tokens of each."""
        if len(sequences) == 1:
            return self._decode_single(sequences[0], drafts[0])
        for sequence in sequences:
            self._compute_missing(sequence)
        size, adapter = len(sequences), sequences[0].adapter
        pads = self._uses_graphs and num_new == 1
        idle_sequences = self._resize_idle(adapter, pad_batch_size(size) - size if pads else 0)
        merged = self.caches.merge([*sequences, *idle_sequences])
        assert merged.cache is not None
        for idle in idle_sequences:
            idle.tokens.append(0)
        by_sequence = dict(zip(sequences, drafts, strict=True)) if num_new > 1 else {}
        try:
            logits = self._forward(merged.members, merged.cache, by_sequence, num_new)
        except BaseException:
            self._resize_idle(adapter, 0)
            raise
        order = [merged.members.index(sequence) for sequence in sequences]
        return logits if order == list(range(len(logits))) else logits[order]

    def _decode_single(self, sequence: Sequence, drafts: abc.Sequence[int] = ()) -> Tensor:
        self.caches.extract([sequence])
        assert sequence.cache is not None
        self._compute_missing(sequence)
        return self._forward([sequence], sequence.cache, {sequence: drafts}, 1 + len(drafts))

    def _compute_missing(self, sequence: Sequence) -> None:
        """Compute accepted drafts again if a recurrent cache has returned to its checkpoint."""
        cache = sequence.cache
        if cache is None or cache.length >= len(sequence.tokens) - 1:
            return
        adapter = sequence.adapter
        with (
            _rewind_on_error(cache),
            cache.speculation_mode(),
            self._adapter_switch.use(adapter),
        ):
            missing = sequence.tokens[cache.length : -1]
            offset = sequence.layout.position_offset
            self.decoder.compute_logits(missing, cache, position_offset=offset)
        self.decoder.num_unsteady_forwards += 1
        cache.states.holder.free_retired_pages()

    def _forward(
        self,
        sequences: list[Sequence],
        cache: TransformersCache,
        drafts: abc.Mapping[Sequence, abc.Sequence[int]],
        num_new: int,
    ) -> Tensor:
        """Run the newest token of each sequence, and its drafts; the cache has all tokens before.

        Sequences with fewer than `num_new - 1` drafts are padded.
        """
        adapter = sequences[0].adapter
        key = len(sequences), num_new, adapter
        replayer = self._replayers.get(key) or self.decoder.make_replayer(
            self._replay_buffers, num_new
        )
        if replayer is not None:
            self._replayers[key] = replayer
        tokens = [[*sequence.tokens[-1:], *drafts.get(sequence, ())] for sequence in sequences]
        padded = [row + [PADDING_TOKEN] * (num_new - len(row)) for row in tokens]
        positions = [len(s.tokens) - 1 + s.layout.position_offset for s in sequences]
        with _rewind_on_error(cache), self._adapter_switch.use(adapter):
            logits = self.decoder.compute_batch_logits(padded, positions, cache, replayer)
        cache.states.holder.free_retired_pages()
        return logits

    @property
    def _uses_graphs(self) -> bool:
        """Whether decodes replay graphs: no capture was refused so far."""
        refused = any(r.refusal is not None for r in self._replayers.values())
        return self.decoder.captures_graphs and not refused

    def _resize_idle(self, adapter: Adapter | None, count: int) -> list[Sequence]:
        """Return `count` idle sequences for an adapter; drop those that became long."""
        idle_sequences = self._idle_sequences.get(adapter, [])
        short = [idle for idle in idle_sequences if len(idle.tokens) < MAX_IDLE_TOKENS]
        remaining = short[:count]
        self.caches.release([idle for idle in idle_sequences if idle not in remaining])
        if count and self._idle_template is None:
            template = Sequence([0])
            self.prefill(template, 1)
            self._idle_template = template
        self._idle_sequences[adapter] = remaining
        while len(remaining) < count:
            assert self._idle_template is not None
            remaining.append(Sequence([0], adapter=adapter))
            self.caches.fork(self._idle_template, remaining[-1])
        return remaining

    def _disable_drafts(self, error: Exception, *, in_batch: bool) -> None:
        """Decode without drafts from now on; if a batch was refused, only in batches."""
        self.verifies_drafts_in_batch = False
        self.verifies_drafts = self.verifies_drafts and in_batch
        name, where = type(self.decoder.model).__name__, " in batches" if in_batch else ""
        log.info("%s: decoding without drafts%s: %s", name, where, str(error))

    def _disable_batching(self, error: Exception) -> None:
        """Decode one sequence at a time from now on."""
        self.ragged = self.verifies_drafts_in_batch = False
        for adapter in [*self._idle_sequences]:
            self._resize_idle(adapter, 0)
        merged = self.caches.merged.values()
        self.caches.extract([member for sequences in merged for member in sequences.members])
        log.info(
            "%s: decoding one sequence at a time: %s", type(self.decoder.model).__name__, str(error)
        )


def pad_batch_size(num_sequences: int) -> int:
    """Round up to a batch size with a graph: 1, 2, 4, 8, 16, 32, 48 and so on."""
    return (
        1 << (num_sequences - 1).bit_length()
        if num_sequences <= 16
        else -(-num_sequences // 16) * 16
    )


def max_idle(max_sequences: int) -> int:
    """Return how many idle sequences a batch may need, including the template.

    The batch has at most `max_sequences` other sequences.
    """
    return 1 + max((pad_batch_size(n) - n for n in range(1, max_sequences + 1)), default=0)


@contextmanager
def _rewind_on_error(cache: TransformersCache) -> Iterator[None]:
    """Rewind the cache to its old length if the forward fails."""
    length = cache.length
    if cache.states.holder.external_states.values():  # models update them in place
        cache.checkpoint()
    try:
        yield
    except BaseException:
        cache.rewind(length)
        raise
