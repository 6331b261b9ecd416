"""What the commands share: flags, output, plan.json."""
