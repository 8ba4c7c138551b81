"""What the commands share: options, finding runs, tables, pictures, and how a command starts and fails."""
