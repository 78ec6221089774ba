"""Content of files that anybody may have made, read without running any of it."""
