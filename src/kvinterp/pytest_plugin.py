"""Nothing: editable installs made before the plugin went still name this module to pytest; `make env` makes them anew."""
