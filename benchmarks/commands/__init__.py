"""The commands of `gbmoe bench`, one file each: the arguments they take, and what they do."""
