"""Parts that every command needs: errors, the terminal, processes, files, text.

Nothing here knows of networks.
"""
