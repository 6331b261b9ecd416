"""ps-serve --print: the files that cluster managers take."""
