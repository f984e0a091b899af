"""Hidden states of documents for training: computed by the target in this process, read from files, or first the one
and then the other.

Layers follow `specflow.targets.base.Taps`; the last state is the one after the final norm, so the target's logits are
`head @ last_hidden`. A provider holds the states of the documents of one call and of no more.
"""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specflow.capture.checks import CaptureError
from specflow.capture.collector import Captured
from specflow.capture.manifest import SETTINGS, Manifest, refuse_other_settings
from specflow.capture.reading import Extraction
from specflow.capture.writer import AsyncWriter
from specflow.core.layer_numbers import CONVENTION
from specflow.errors import StorageError
from specflow.targets import transformers_facts as facts
from specflow.targets.base import Taps, TargetFacts
from specflow.targets.taps import TapHooks
from specflow.training.documents import Document

__all__ = ["HiddenProvider", "HybridProvider", "OnlineProvider", "States", "StoredProvider", "capture_settings"]

_THREADS = 4
_GROUP = 32  # documents whose states are in memory at once
_SPARE_BYTES = 1 << 28  # of the disk, left to others


@dataclass(frozen=True)
class States:
    """What the target thought at every token of one document."""

    hidden: Tensor  # [T, A, E], the target's dtype, layers in the order asked for
    last_hidden: Tensor | None  # [T, E] after the final norm


class HiddenProvider(Protocol):
    """Where a trainer gets hidden states from."""

    def states(self, documents: Sequence[Document]) -> list[States]:
        """States of the documents, in their order, on the training device. Raises `CaptureError` with the id of a
        document whose states are missing, incomplete or of other tokens."""
        ...


class OnlineProvider:
    """A forward pass of the target over documents of similar length side by side; nothing is kept."""

    def __init__(self, model: Any, taps: Taps, device: torch.device, forward_tokens: int) -> None:
        """model: a transformers model that no engine is attached to. forward_tokens: most tokens of one pass, padding
        included (a longer document runs alone)."""
        self._model, self._taps, self._device, self._budget = model, taps, device, forward_tokens

    @torch.no_grad()
    def states(self, documents: Sequence[Document]) -> list[States]:
        """See `HiddenProvider.states`."""
        found: dict[int, States] = {}
        with own_forward(self._model, self._taps, fast_attention(self._model)) as (decoder, hooks):
            for part in _similar(documents, self._budget):
                longest = max(len(documents[index]) for index in part)
                ids = torch.zeros(len(part), longest, dtype=torch.int64)
                for row, index in enumerate(part):
                    ids[row, : len(documents[index])] = documents[index].token_ids
                # Padding stands behind the text and attention is causal, so no mask is needed.
                decoder(input_ids=ids.to(self._device), use_cache=False)
                for row, index in enumerate(part):
                    found[index] = _rows(hooks, self._taps, row, len(documents[index]))
        return [found[index] for index in range(len(documents))]


def _rows(hooks: TapHooks, taps: Taps, row: int, length: int) -> States:
    hidden = torch.stack([hooks.hidden[layer][row, :length] for layer in taps.layers], dim=1)
    last = hooks.last_hidden
    return States(hidden, None if last is None else last[row, :length].clone())


def _similar(documents: Sequence[Document], budget: int) -> Iterator[list[int]]:
    """Indices of documents that run side by side, the longest first."""
    part: list[int] = []
    for index in sorted(range(len(documents)), key=lambda index: -len(documents[index])):
        if part and (len(part) + 1) * len(documents[part[0]]) > budget:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def fast_attention(model: Any) -> str:
    """torch's fused attention, or the model's own where that one would leave something out."""
    config = facts.text_config(model)
    plain = not getattr(config, "attn_logit_softcapping", None) and getattr(model, "_supports_sdpa", False)
    return "sdpa" if plain else "eager"


@contextmanager
def own_forward(model: Any, taps: Taps, attention: str) -> Iterator[tuple[Any, TapHooks]]:
    """The decoder as transformers runs it, with taps that keep the batch axis; everything is undone afterwards."""
    before = facts.current_attention(model)
    facts.use_attention(model, attention)
    hooks = TapHooks(model, taps, batched=True)
    try:
        yield facts.decoder(model), hooks
    finally:
        hooks.remove()
        facts.use_attention(model, before)


def capture_settings(known: TargetFacts, taps: Taps) -> dict[str, Any]:
    """What all files of a capture have in common; `extract.json` of the folder states it."""
    return {
        "target": known.name,
        "target_hash": known.checkpoint_hash,
        "layers": list(taps.layers),
        "layer_convention": CONVENTION,
        "last_hidden": "after the final norm" if taps.last_hidden else None,
        "hidden_size": known.hidden_size,
        "dtype": str(known.dtype).removeprefix("torch."),
    }


class StoredProvider:
    """Reads a folder that the capture stage, or `task=extract`, has written."""

    def __init__(self, folder: Path, known: TargetFacts, taps: Taps, device: torch.device) -> None:
        """Raises `StorageError` for a folder without a capture, `ConfigError` for one of another target or layers."""
        if not (folder / SETTINGS).exists():
            raise StorageError(f"{folder} holds no captured hidden states: run task.stage=capture first.")
        self._extraction = Extraction(folder)
        wanted = capture_settings(known, taps)
        found = {key: self._extraction.settings.get(key) for key in wanted}
        refuse_other_settings(found, wanted, f"{folder} holds hidden states captured")
        self._device = device
        self._verified: set[str] = set()  # read once, their hash compared

    def __contains__(self, document: Document) -> bool:
        return document.id in self._extraction.entries

    def verify(self, documents: Sequence[Document]) -> None:
        """Read every document once, all checks of `Extraction.read` included. Raises `CaptureError` naming the first
        that cannot be right."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(documents), _GROUP):  # not more in memory than a group
                list(pool.map(self._read, documents[start : start + _GROUP]))

    def states(self, documents: Sequence[Document]) -> list[States]:
        """See `HiddenProvider.states`."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._read, documents))

    def _read(self, document: Document) -> States:
        if document not in self:
            raise CaptureError(
                f"response {document.id!r} has no captured hidden states in {self._extraction.folder}: run "
                "task.stage=capture again; it adds what is missing."
            )
        record = self._extraction.read(document.id, verify=document.id not in self._verified)
        self._verified.add(document.id)
        length = len(document)
        if record.entry.first_position or not torch.equal(record.token_ids[:length], document.token_ids):
            raise CaptureError(
                f"response {document.id!r}: the captured hidden states are of other tokens than the response has "
                f"({len(record.token_ids)} from position {record.entry.first_position}, {length} wanted). Delete "
                f"{self._extraction.folder} and run task.stage=capture again."
            )
        hidden, last = record.hidden_states[:length], record.last_hidden
        return States(hidden.to(self._device), None if last is None else last[:length].to(self._device))


class HybridProvider:
    """Online the first time, and written; read from then on."""

    def __init__(self, folder: Path, online: OnlineProvider, known: TargetFacts, taps: Taps) -> None:
        """Open the folder for writing; `close` it at the end. Raises `ConfigError` for one made otherwise."""
        self._online, self._known, self._taps, self._folder = online, known, taps, folder
        self._manifest = Manifest(folder, capture_settings(known, taps), resume=True)
        self._stored = StoredProvider(folder, known, taps, online._device)

    def states(self, documents: Sequence[Document]) -> list[States]:
        """See `HiddenProvider.states`. When any document is missing all are computed, so that the values do not depend
        on where a run was interrupted."""
        self._stored._extraction.entries = self._manifest.entries
        if all(document in self._stored for document in documents):
            return self._stored.states(documents)
        found = self._online.states(documents)
        self.write(documents, found)
        return found

    def write(self, documents: Sequence[Document], found: Sequence[States]) -> None:
        """Save states that are not there yet, and wait until the disk has them."""
        hash_of_target = self._known.checkpoint_hash
        with AsyncWriter(self._manifest, self._taps.layers, hash_of_target, _THREADS) as writer:
            for document, states in zip(documents, found, strict=True):
                if document not in self._stored:
                    writer.submit(_captured(document, states))

    def capture(self, documents: Sequence[Document]) -> Iterator[int]:
        """Compute and save the states of all documents; yields how many are there. Raises `StorageError` when the
        disk has too little room."""
        missing = [document for document in documents if document.id not in self._manifest.entries]
        self._check_room(missing)
        done = len(documents) - len(missing)
        for start in range(0, len(missing), _GROUP):
            part = missing[start : start + _GROUP]
            self.states(part)
            done += len(part)
            yield done

    def _check_room(self, missing: Sequence[Document]) -> None:
        known = self._known
        per_token = (len(self._taps.layers) + self._taps.last_hidden) * known.hidden_size * known.dtype.itemsize + 8
        needed = sum(map(len, missing)) * per_token
        free = shutil.disk_usage(self._folder).free
        if needed + _SPARE_BYTES > free:
            raise StorageError(
                f"hidden states of {len(missing)} responses take {needed / 2**30:.1f} GiB and {self._folder} has "
                f"{free / 2**30:.1f} GiB left. Use task.capture=online, which stores nothing, or another task.output."
            )

    def close(self) -> None:
        """Let others write to the folder."""
        self._manifest.close()


def _captured(document: Document, states: States) -> Captured:
    last = states.last_hidden
    return Captured(
        request_id=document.id,
        prompt_ids=document.ids[: document.num_prompt_tokens],
        first_position=0,
        token_ids=document.token_ids,
        hidden_states=states.hidden.cpu(),
        last_hidden=None if last is None else last.cpu(),
    )
