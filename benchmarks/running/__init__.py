"""How rows are made on several ranks: every one makes the same, and they are timed in turns."""
