"""Numbers and texts as people write and read them: in data, in flags, on terminals and in spreadsheets."""
