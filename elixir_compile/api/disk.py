"""The options `disk_path` and `disk_check`, and plans that need them."""

from pathlib import Path

from elixir_compile.errors import InvalidOption
from elixir_compile.ir import Plan, Tier
from elixir_compile.options import Options


def disk_of(options: Options) -> tuple[Path, bool] | None:
    """Return the folder for state on disk and whether what is read there is checked; None without `disk_path`."""
    return None if options.disk_path is None else (options.disk_path, options.disk_check)


def require_disk(plan: Plan, disk: tuple[Path, bool] | None) -> None:
    """Raise InvalidOption where `plan` keeps optimizer state on disk and there is no folder for it."""
    there = [placement.bucket for placement in plan.placements if placement.optim is Tier.DISK]
    if there and disk is None:
        some = ", ".join(there[:4]) + (f" and {len(there) - 4} more" if len(there) > 4 else "")
        raise InvalidOption(
            "disk_path", None, f"a folder, as plan {plan.name} keeps the optimizer state of {some} on disk"
        )
