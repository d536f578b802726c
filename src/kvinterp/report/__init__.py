"""The room of pages and figures. Nothing here computes a divergence."""
