"""Versions as Hugging Face directories on the disk of a server that can load nothing else, made of records.

A reader of a chain of records (record.py): it holds the bits of the newest version, takes what changed since, and
writes the directory that a server then loads. app/roles/receiver.py runs one beside each such server.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import threading

from areal_jax.files import remove_directory
from areal_jax.formats.hf_config import CONFIG, read_hf_config
from areal_jax.formats.hf_export import COMPANIONS, HfCompanions, plan_hf_files
from areal_jax.models.shape import ModelConfig
from areal_jax.publication.export import write_hf_directory
from areal_jax.publication.files_channel import not_as_published, parse_manifest
from areal_jax.publication.manifest import encode_manifest
from areal_jax.publication.record import Held, Record, RecordReceiver, put_leaf
from areal_jax.publication.versions import MANIFEST, PublicationError, list_versions, version_path
from areal_jax.publication.weight_buffers import WeightBuffers, decode_delta
from areal_jax.types import Tree

_KEPT = 2  # directories: that of the version in use, which a server may load again, and the next
_HEAD = 'head'


@dataclasses.dataclass(frozen=True)
class Template:
    """What all versions of a run have in common.

    Args:
      source: a directory with config.json, the tokenizer and what else belongs to the model.
      config: of the model, as the learner has it.
      separate_head: a head that is the embedding is written as a tensor of its own too.
    """

    source: pathlib.Path
    config: ModelConfig
    separate_head: bool


def copy_template(version: pathlib.Path, target: pathlib.Path) -> Template:
    """Copies to `target` what the directory of a version holds beside weights: the learner removes old versions.

    Raises PublicationError for a directory that no run has published, HfError for another model's config.
    """
    try:
        _, manifest = parse_manifest((version / MANIFEST).read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_as_published(version, -1, error) from error
    target.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, *COMPANIONS):
        if (version / name).is_file():
            shutil.copyfile(version / name, target / name)
    stored, tied = read_hf_config(target), _HEAD not in manifest
    return Template(target, dataclasses.replace(stored, tie_embeddings=tied), tied and not stored.tie_embeddings)


class HfReceiver:
    """Makes directories of versions under `directory`. Calls may come from several threads; one works at a time.

    Args:
      receiver: of the records.
      template: its files go into every directory, its shape and head are those of all versions.
    """

    def __init__(self, receiver: RecordReceiver, template: Template, directory: pathlib.Path):
        self._receiver, self._template, self._directory = receiver, template, directory
        self._buffers, self._lock = WeightBuffers(), threading.Lock()
        self._written: Held | None = None  # the newest directory

    @property
    def held(self) -> Held | None:
        """What is in memory; None: nothing that can be relied on."""
        return self._buffers.held

    def bring(self, version: int, manifest_hash: str) -> pathlib.Path:
        """The directory of a version, which is written unless it is there.

        A delta that does not lead to this manifest is followed by the whole record of the chain, once.

        Raises PublicationError for a version that cannot be had, or not as it was published, and for a full disk; the
        directories of earlier versions stay as they are.
        """
        wanted = Held(version, manifest_hash)
        with self._lock:
            if self._written == wanted:
                return version_path(self._directory, version)
            self._hold(wanted)
            target = self._write(wanted)
            self._written = wanted
            self._remove_old(version)
            self._receiver.acknowledge(wanted)
            return target

    def close(self) -> None:
        self._receiver.close()

    def _hold(self, wanted: Held) -> None:
        """Brings the bits in memory to the version."""
        if self._buffers.in_use:  # an error that is still being reported may refer to them
            self._buffers = WeightBuffers()
        first, held = None, self._buffers.held
        if held is not None and held.version < wanted.version:
            try:
                self._receiver.fetch(wanted.version, held, self._consume)
            except PublicationError as error:
                first = error
        if self._buffers.held != wanted:
            try:
                self._receiver.fetch(wanted.version, None, self._consume)
            except PublicationError as error:
                raise error from first
        if self._buffers.held != wanted:
            found, self._buffers.held = self._buffers.held, None
            raise PublicationError(
                f'version {wanted.version} with manifest {wanted.manifest_hash[:12]} was asked for, and its records '
                f'lead to {found}: give every run a publication.directory of its own'
            )

    def _consume(self, record: Record) -> None:
        if record.header.base is None:
            self._buffers.load(record)
        else:
            self._buffers.apply(decode_delta(record))

    def _write(self, wanted: Held) -> pathlib.Path:
        template, target = self._template, version_path(self._directory, wanted.version)
        tree: dict[str, Tree] = {}
        for path, leaf in self._buffers.lend().items():
            put_leaf(tree, path, leaf)
        plan = plan_hf_files(
            tree,
            template.config,
            companions=HfCompanions(source=template.source),
            separate_head=template.separate_head,
        )
        manifest = {
            'format': 1, 'version': wanted.version, 'manifest_hash': wanted.manifest_hash,
            'leaves': encode_manifest(self._buffers.manifest),
        }  # fmt: skip
        write_hf_directory(target, plan, {MANIFEST: manifest}, elsewhere='name another --directory')
        return target

    def _remove_old(self, version: int) -> None:
        """What is left of a run that was resumed from before this version goes too."""
        made = list_versions(self._directory)
        kept = sorted(v for v in made if v <= version)[-_KEPT:]
        for v, path in made.items():
            if v not in kept:
                remove_directory(path)
