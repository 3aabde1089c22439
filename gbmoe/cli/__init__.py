"""The command line: parser.py has its commands and exit statuses, and every command a file of its own."""

from gbmoe.cli.parser import main

__all__ = ["main"]
