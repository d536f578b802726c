"""WHAT THE LITERATURE ASKS of many prompts: a study a file, what a model still does under a path,
and Ray.
"""
