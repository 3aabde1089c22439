"""What the tests, `gbmoe verify` and `gbmoe bench` share: shapes, inputs, the oracle, and the errors that are allowed."""
