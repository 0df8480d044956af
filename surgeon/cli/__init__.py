"""What a person types. Parses, renders, exits; nobody imports it."""
