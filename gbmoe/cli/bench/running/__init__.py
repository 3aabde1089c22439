"""How a measurement becomes a row: it is verified, then timed; those of peers run in processes of their own."""
