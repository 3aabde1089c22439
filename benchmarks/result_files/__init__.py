"""Result files that are read, and what is made of their rows: pages and pictures."""
