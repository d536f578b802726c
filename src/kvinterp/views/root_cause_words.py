"""What the root-cause experiments found, in sentences."""

def said_of_root_cause(tables, about): return []
