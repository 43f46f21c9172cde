"""What a request holds, and where: static specs, records, the state, the host tier."""
