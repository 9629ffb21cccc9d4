"""The commands of `octopus`, a module or package each, and what they share."""
