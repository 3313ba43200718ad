"""What Elixir keeps for each prepared model: its parameters' homes, compilations, programs and plans in force."""
