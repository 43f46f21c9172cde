"""What the scripts time beside `jshadow bench`: other systems, the stages of a step, and speculation."""
