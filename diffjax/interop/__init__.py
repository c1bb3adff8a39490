"""Models in other people's layouts: each module reads one into a `Model`, or writes one."""
