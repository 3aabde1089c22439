"""How a measurement becomes a row: it is verified, then timed; those of rivals run in processes of their own."""
