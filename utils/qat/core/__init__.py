"""What every command needs: errors, the terminal, processes, files, text. It knows nothing of networks."""
