"""The errors of checkpoints; their place in the tree of `elixir_compile.base.errors`:

```text
ElixirError
└── _CheckpointError                        a checkpoint that cannot be loaded or saved
    ├── NotACheckpoint     (OSError)        nothing at the path, or something that is no checkpoint
    ├── CheckpointCorrupted (OSError)       a file is damaged, cut off or missing
    ├── CheckpointMismatch (ValueError)     saved from another model, optimizer or scheduler
    └── NotSavable         (ValueError)     a value of a type that a checkpoint cannot hold
```
"""

# ruff: noqa: N818 - as in `elixir_compile.base.errors`

from collections.abc import Sequence

from elixir_compile.base.errors import ElixirError

_MOST_SHOWN = 8
"""The number of differences that the text of an error lists."""


class _CheckpointError(ElixirError):
    """An error about the checkpoint at `path`."""

    path: str


class NotACheckpoint(_CheckpointError, OSError):
    """There is no checkpoint at `path`; `because` describes the content of `path`."""

    because: str
    _text = "{path} is no checkpoint: {because}. Name a folder that `elixir_compile.save` wrote."


class CheckpointCorrupted(_CheckpointError, OSError):
    """The file `file` of the checkpoint at `path` is damaged; `key` is the first lost value, or '' if unknown."""

    file: str
    key: str
    because: str

    def __str__(self) -> str:
        spoiled = f", so {self.key} cannot be read" if self.key else ""
        return (
            f"checkpoint {self.path}: {self.file} {self.because}{spoiled}. Nothing was loaded. "
            f"Load an earlier checkpoint, or another copy of this one."
        )


class CheckpointMismatch(_CheckpointError, ValueError):
    """The checkpoint at `path` was saved from another `what` (model, optimizer, scheduler); `differences` lists why."""

    what: str
    differences: Sequence[str]

    def __str__(self) -> str:
        more = len(self.differences) - _MOST_SHOWN
        listed = "".join(f"\n  {difference}" for difference in self.differences[:_MOST_SHOWN])
        rest = f"\n  and {more} more" if more > 0 else ""
        return f"checkpoint {self.path} was saved from another {self.what}; nothing was loaded:{listed}{rest}"


class NotSavable(_CheckpointError, ValueError):
    """The value at `key` has a `kind` that a checkpoint cannot hold."""

    key: str
    kind: str
    _text = (
        "{key} cannot be saved to {path}: a checkpoint holds tensors, numbers, texts, None, and lists, tuples and "
        "dicts of them, and this is {kind}. Leave it out, or turn it into one of them."
    )
