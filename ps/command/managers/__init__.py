"""ps-serve --print: the files that managers such as Slurm and Kubernetes take."""
