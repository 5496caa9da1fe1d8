"""Pages of docs/ that are written by programs: ``python -m octavo_bench.reference`` writes them all."""
