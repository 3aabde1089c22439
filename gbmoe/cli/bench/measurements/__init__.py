"""What `gbmoe bench` measures, one file for each kind of row; benchmarks/measurements has more."""
