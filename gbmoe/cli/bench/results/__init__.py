"""The result file of a run, and what is made of its rows: tables, pages, pictures and the article's findings."""
