"""WHAT IS ASKED: a command a file, and what all commands have in common; wings hand in theirs."""
