"""The command line: picks a command, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from tensorformer.cli.bench import Bench
from tensorformer.cli.compare import Compare
from tensorformer.cli.gallery import Gallery
from tensorformer.cli.generate import Generate
from tensorformer.cli.list import List
from tensorformer.cli.report import Report
from tensorformer.cli.study import Study
from tensorformer.cli.train import Train

DESCRIPTION = """Tensor Transformers: bilinear layers, bilinear attention, and matched comparisons of what they cost.

Begin with `tensorformer compare recipes/demo.toml`, or add --dry-run to see first what it would train.
Exit codes: 0 done, 1 the input was at fault, 2 the command line was, 130 Ctrl-C (run the same command to go on)."""

STUDY = "Study activations (their errors, their ranges, a kernel's definition), or where attention looks."

Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Gallery, tyro.conf.subcommand("gallery")]
    | Annotated[Study, tyro.conf.subcommand("study", description=STUDY)]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    command = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType]
        prog="tensorformer",
        description=DESCRIPTION,
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    from tensorformer.errors import TensorformerError

    try:
        command.run()
    except KeyboardInterrupt:
        print("\nstopped; run the same command to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TensorformerError, OSError, MemoryError, RuntimeError) as e:
        out_of_memory = "memory" in str(e).lower() or isinstance(e, MemoryError)  # torch has no class for it on a CPU
        if command.debug or (type(e) is RuntimeError and not out_of_memory):
            raise
        print(f"error: {_one_line(e)}", file=sys.stderr)
        return 1
    return 0


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
