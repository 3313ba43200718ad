"""Tensors by key to a folder and back, by torch.distributed.checkpoint (DCP), of one process.

The folder is DCP's own format, one `.distcp` file per rank and `.metadata`, which any version of DCP reads. Its writer,
reader and planners are called one after another here, as `dcp.save` and `dcp.load` do: those two warn at every call
without a process group, and a warning cannot be silenced in a thread alone.

`.metadata` is a pickle. It is read by an unpickler that knows the few classes of DCP's metadata and nothing else; a
tensor is read by `torch.load(weights_only=True)`. DCP's safetensors storage needs no pickle at all, but puts a whole
file together in memory (`safetensors.torch.save` in torch 2.13), and gives a sharded folder no index.
"""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from elixir_compile.checkpoint.sums import FileRecord, SummedFileSystem
from elixir_compile.checkpoint.values import Deferred, Sources

_METADATA_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint."
_KNOWN = {
    *(
        (f"{_DCP}metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
"""What a `.metadata` file may name, besides the dtypes of torch."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _KNOWN and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is nothing of a checkpoint")
        return super().find_class(module, name)


class _Writer(FileSystemWriter):
    """DCP's writer, with checksums, and without the path in what it writes: the folder will be renamed."""

    def __init__(self, folder: Path) -> None:
        # Nothing is copied ahead: the planner brings tensors to the host, one at a time.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.summed = SummedFileSystem()
        self.fs = self.summed

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner; a tensor is brought to the host when it is its turn, and its copy is gone when the next is."""

    def __init__(self, sources: Sources, *, is_spent: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self._sources = sources
        self._is_spent = is_spent
        self._copy: torch.Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        # The writer keeps every tensor of a file until the file is done (`tensor_dict` in torch 2.13), so what is
        # written is emptied under its hands.
        if self._copy is not None:
            self._copy.untyped_storage().resize_(0)
        source = self._sources.pop(index.fqn) if self._is_spent else self._sources[index.fqn]
        given = source.read() if isinstance(source, Deferred) else source.detach()
        tensor = given.cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # or the writer would copy it, and keep that
            tensor = tensor.clone()
        is_own = self._is_spent or isinstance(source, Deferred) or tensor.data_ptr() != given.data_ptr()
        self._copy = tensor if is_own else None
        return tensor


class Reader(FileSystemReader):
    """DCP's reader of a folder, which reads its metadata once; raises pickle.UnpicklingError for what is none."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / _METADATA_FILE).open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
        self.metadata = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what was read."""
        return self.metadata

    @property
    def forms(self) -> Mapping[str, torch.Tensor]:
        """By key a tensor on `meta`, of the shape and dtype that are stored."""
        return {
            key: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for key, stored in self.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def key_at(self, file: str, byte: int) -> str:
        """Return the key of the first tensor that ends behind `byte` of `file`, or ''."""
        ends = [
            (place.offset + place.length, index.fqn)
            for index, place in self.metadata.storage_data.items()
            if place.relative_path == file and place.offset + place.length > byte
        ]
        return min(ends)[1] if ends else ""

    def fresh(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the tensors under `keys`, in new memory of the host."""
        forms = self.forms
        tensors = {key: torch.empty(forms[key].shape, dtype=forms[key].dtype) for key in keys}
        self.read_into(tensors)
        return tensors

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the tensors `targets`, in place, wherever they are."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(targets), self.metadata, is_coordinator=True)
        self.set_up_storage_reader(self.metadata, is_coordinator=True)
        local = self.prepare_local_plan(planner.create_local_plan())
        (plan,) = self.prepare_global_plan(planner.create_global_plan([local]))
        self.read_data(planner.finish_plan(plan), planner).wait()


def write(folder: Path, sources: Sources, *, is_spent: bool) -> Mapping[str, FileRecord]:
    """Write `sources` to the new `folder`, synced to the disk, and return the records of the files.

    One tensor at a time is copied, where it is not in host memory; with `is_spent`, sources are taken away and their
    memory is freed as they are written. OSError for what the system refuses.
    """
    writer, planner = _Writer(folder), _SavePlanner(sources, is_spent=is_spent)
    forms = {key: source.like if isinstance(source, Deferred) else source.detach() for key, source in sources.items()}
    writer.set_up_storage_writer(is_coordinator=True)
    planner.set_up_planner(forms, writer.storage_meta(), is_coordinator=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [results.wait()])
    return writer.summed.records
