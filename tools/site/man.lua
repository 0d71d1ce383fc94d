-- Man pages show a table of options or fields as a list of terms: a column is too narrow for their text.
function Table(tbl)
  local simple = pandoc.utils.to_simple_table(tbl)
  local items = {}
  for _, row in ipairs(simple.rows) do
    local function inlines(cell) return pandoc.utils.blocks_to_inlines(cell) end
    if #simple.headers ~= 4 then return tbl end
    local term = inlines(row[1])
    local value, default = inlines(row[2]), inlines(row[3])
    if #value > 0 then
      term:insert(pandoc.Space())
      term:extend(value)
    end
    if #default > 0 then
      term:insert(pandoc.Str(" [default: "))
      term:extend(default)
      term:insert(pandoc.Str("]"))
    end
    items[#items + 1] = {term, {{pandoc.Plain(inlines(row[4]))}}}
  end
  return pandoc.DefinitionList(items)
end

-- Links have no use on paper.
function Link(link) return link.content end
