"""The command line, where no script `elixir-compile` is installed: `python -m elixir_compile doctor`."""

from elixir_compile.cli.main import main

main()
