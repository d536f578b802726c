"""The operations of a program, one file each."""
