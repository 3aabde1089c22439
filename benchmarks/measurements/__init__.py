"""What only the suites of this folder measure, one file for each kind of row."""
