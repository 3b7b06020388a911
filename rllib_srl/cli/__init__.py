"""The console command `srl`: one module per subcommand."""
