"""Plan -> launch files. One module a target; templates are files; every folder is written whole or not at all."""
