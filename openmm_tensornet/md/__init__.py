"""The application: runs, their files and what is made of them, on the command line and in Python."""
