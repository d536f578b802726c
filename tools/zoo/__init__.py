"""How the checkpoints of kvinterp.models.zoo were made: `make zoo` makes them again."""
