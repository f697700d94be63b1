"""What people read: tables, figures, plans, studies, the report page and the scorecard."""
