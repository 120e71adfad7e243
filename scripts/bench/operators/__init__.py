"""One operator a file: what takes turns, what it must move or multiply at least, and what is to be reached."""
