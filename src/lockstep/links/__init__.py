"""What the links between ranks can do: checked (doctor), measured (bench), and predicted (model)."""
