"""How the base model of `octopus demo` was made: `corpus` on a CPU, then `train` on a GPU."""
