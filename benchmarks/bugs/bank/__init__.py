"""Clean models and planted bugs that an audit is tried on, made without a look at how it works."""
