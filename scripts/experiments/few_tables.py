def write_tables(*a): pass
