"""The command line, where no script `elixir-compile` is installed: `python -m elixir_compile doctor`."""

from elixir_compile.tools.cli.main import main

main()
